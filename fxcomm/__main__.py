"""``python -m fxcomm``, as ``torchrun -m fxcomm`` starts it."""

from fxcomm.cli import main

if __name__ == "__main__":
    main()
