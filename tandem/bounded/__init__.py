"""Work on what strangers wrote, in a process of its own, within bounds on time and memory."""
