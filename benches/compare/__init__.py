"""Measures Offbeat, gloo and OpenMPI in one run: `python -m benches.compare` from the root of the repository.

cases.py    what is measured, and what it should reach
launch.py   starts the ranks: mpirun, plain processes, or hosts of netlab
rank.py     one rank: every engine in one process, in turns
engines.py  the engines behind one face
training.py the same for training: what, and what follows from the samples
algorithms.py  the same for algorithms that send less
training_jobs.py  starts the ranks of both; train_rank.py and algorithm_rank.py are one of them
codecs.py   codecs on one core, by the Rust bench
idle.py     what a rank costs that does nothing
report.py   table, JSON and BENCHMARKS.md; chart.py the PNG
"""
