"""`tandem up`: the command, what each service is started with, and where it runs."""
