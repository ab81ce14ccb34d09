"""Pure analysis of captured graphs; imports no torch.distributed."""
