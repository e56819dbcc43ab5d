"""Reads Hugging-Face-named tensors out of safetensors folders and GGUF files. Knows no models and no devices."""
