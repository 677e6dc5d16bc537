"""`tandem context`: the command, and the file with the named coordinators."""
