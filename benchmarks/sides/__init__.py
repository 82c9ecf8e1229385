"""The sides that `benchmarks/peers.py` compares, one file each, every one run in a process of its own.

worker.py   the process: gets its job, runs the side that it is told, answers the driver
models.py   the models, as plain torch that every side imports
ours.py, plain.py, pfl.py, flower.py    the sides; each has `run(job, link)`
"""
