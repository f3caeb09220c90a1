"""The models that the cpu profile serves: plain Llama and its EAGLE drafts.

``SGLANG_EXTERNAL_MODEL_PACKAGE=sglang_tiny_models`` makes SGLang register these instead of importing some 200 model files
at every start.
"""

__aerie_stand_in__ = True
