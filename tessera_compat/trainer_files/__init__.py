"""Translate files of DeepSpeed, accelerate, LLaMA-Factory, ms-swift and axolotl to recipes."""
