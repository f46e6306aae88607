"""The framework: multi-group draft proposers on vLLM's own data types, free of any model runner."""
