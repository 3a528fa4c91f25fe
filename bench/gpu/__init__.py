"""What the kernels reach on a GPU, against a copy, torch, Liger and torchao in the same run: `python -m bench.gpu`.

It has not been run on a GPU yet, so bench/results has no gpu.json; tests run its cases in Triton's interpreter.
`first_run` asks first what is wrong there: `python -m bench.gpu.first_run`.

__main__  the command          case    what is measured: sides, work, targets, and the gate before it
timing    how it is measured   report  the table and the JSON
shapes    the sizes            quantize, norms, permute, scaled, grouped, linear: the cases of one section each
"""
