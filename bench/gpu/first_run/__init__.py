"""A GPU's first minutes with this code: what is wrong with which input, the most valuable questions first.

    python -m bench.gpu.first_run [--minutes 8] [--out FOLDER]
    python -m bench.gpu.first_run --rehearse            the same on a CPU, with Triton's interpreter and small samples

__main__  the command                     plan       the parts, in order, and the seconds of each
runner    processes, limits, JSON         worker     one process of one part: its cases, one after another
setting   the device, or what stands in   summary    what is wrong with which input, in words
subjects  modules and models of one step
device, kernels, bits, modules, compiled, training, speed, graphs: the cases of one part each

Needs torch and triton alone: neither pytest nor hypothesis (tests/bench/test_first_run_rehearsal.py), nor a network.
"""
