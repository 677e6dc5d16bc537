"""The engine itself: jobs, the scheduler, the thread that runs steps, and the ordered list of step backends.

Services import it; nothing else in `tandem.engine` does.
"""
