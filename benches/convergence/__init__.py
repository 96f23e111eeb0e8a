"""Trains two real tasks with every algorithm, beside torch's DDP: `python -m benches.convergence` from the root.

methods.py  which algorithms, with which learning rate, and how near to DDP they should come; what follows from the runs
tasks.py    the tasks: data and networks
rank.py     one rank: every run in one process, one after the other
report.py   table, JSON and BENCHMARKS.md; chart.py the picture
"""
