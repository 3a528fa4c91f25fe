"""What layers add to the residual stream beside their mixers and MLPs, one file an idea.

alternating_updates   several lanes, of which layers read one (AltUp)
laurel                a learned residual of low rank beside attention
layer_scalar          a stored factor of each layer
per_layer_embedding   an embedding of each layer, gated in behind the MLP

Hyper-connections, which every sublayer reads and writes through, are `te_models/model/hyper_connection.py`.
"""

from .alternating_updates import AlternatingUpdates, LaneProjections
from .laurel import Laurel
from .layer_scalar import LayerScalar
from .per_layer_embedding import PerLayerEmbedding

__all__ = ["AlternatingUpdates", "LaneProjections", "Laurel", "LayerScalar", "PerLayerEmbedding"]
