"""Remedies in copies of one pretrained model, with quality beside smoothness, before and after a short fine-tune."""
