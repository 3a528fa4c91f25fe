"""Examples of the names of `te_models.hf`. A cell begins with the names that it shows; each runs by itself."""

# %% register
import transformers
from te_models.hf import register

register()  # importing te_models.hf has done it; a second call changes nothing
model = transformers.AutoModelForCausalLM.from_pretrained("quickstart-out/model")
print(type(model).__name__)

# %% TransformersCache
import torch
import transformers
from te_models import GPTModel
from te_models.hf import TransformersCache

model = GPTModel.from_pretrained("quickstart-out/model").eval()
past = transformers.DynamicCache()
with torch.no_grad():
    model(torch.arange(4)[None], cache=TransformersCache(past, model.config))
print(past.get_seq_length())
