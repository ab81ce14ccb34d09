"""fxcomm: a torch.compile backend for sharded, overlapped data-parallel training."""
