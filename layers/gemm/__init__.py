"""The GEMMs of dense and grouped layers as differentiable functions of tensors and quantizers; no module is known here.

`three_gemms` says which three products a layer is made of and what their operands are encoded to, in the layout of
their rows (`rows`); `product` multiplies them. `autograd` makes one function of it for every layer.

May import: `te_models.kernels`, `..quantizer`, `..tensor`, `..recipe`, `..dynamo`.
"""
