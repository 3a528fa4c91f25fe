"""Examples of the names of `te_models.lora`. A cell begins with the names that it shows; each runs by itself."""

# %% add_lora, lora_state_dict, merge_lora
from te_models import GPTModel
from te_models.lora import add_lora, lora_state_dict, merge_lora

model = GPTModel.from_pretrained("quickstart-out/model")
add_lora(model, rank=8, alpha=16, targets=["linear_qkv", "mlp.*"], use_dora=True)
print(len(lora_state_dict(model)), "tensors are trained")
merge_lora(model)  # an ordinary model again

# %% save_adapter, load_adapter, export_adapter
from te_models import GPTModel
from te_models.lora import add_lora, export_adapter, load_adapter, save_adapter

model = GPTModel.from_pretrained("quickstart-out/model")
add_lora(model, rank=8)
save_adapter(model, "adapter", base_model="quickstart-out/model")  # the names of our layers
export_adapter(model, "adapter-hf", base_model="SmolLM2-135M")  # those of transformers' model, for peft
load_adapter(GPTModel.from_pretrained("quickstart-out/model"), "adapter")

# %% Adapter
from te_models import GPTModel
from te_models.lora import Adapter, add_lora

model = GPTModel.from_pretrained("quickstart-out/model")
add_lora(model, rank=8, targets=["linear_proj"])
print({type(m.base_layer).__name__ for m in model.modules() if isinstance(m, Adapter)})  # {'Linear'}
