"""Other formats, read and written: Hugging Face safetensors, torch DCP, DeepSpeed's regular and universal layouts."""
