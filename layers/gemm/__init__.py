"""The GEMMs of dense and grouped layers as differentiable functions of tensors and quantizers; no module is known here.

A pass encodes its operands (`encode`) in the layout of their rows (`rows`), multiplies them (`product`), and
`gradients` says which three products a layer is made of. `autograd` makes one function of it for every layer.

May import: `te_models.kernels`, `..quantizer`, `..tensor`, `..recipe`, `..dynamo`.
"""
