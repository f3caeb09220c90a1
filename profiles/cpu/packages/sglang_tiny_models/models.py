"""What SGLang's model registry reads: every class of ``EntryClass`` is a model architecture."""

from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

EntryClass = [LlamaForCausalLM, LlamaForCausalLMEagle, LlamaForCausalLMEagle3]
