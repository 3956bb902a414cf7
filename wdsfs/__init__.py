"""wdsfs: mount WebDataset shards as directories."""

__version__ = "0.1.0"
