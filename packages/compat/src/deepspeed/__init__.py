"""Scripts written for DeepSpeed run on the ds packages. What each name is here: `deepspeed._surface`."""

from deepspeed._finder import fill, install

install()
fill(__name__, globals())
