"""`make gpu-check`: what emulation has shown, once more on real hardware, as one report to paste into an issue."""
