"""The Llama family in PyTorch: loading, tokenizing, attention over paged KV, sampling."""
