"""In place of torchvision, whose builds do not fit a CPU torch here: text models only import it."""

__version__ = "0+standin"
