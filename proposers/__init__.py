"""The proposers and the vLLM plugin: each proposer is a descriptor and what is truly its own."""
