"""FileStore: blocks as files of one directory, for one host or one shared file system."""
