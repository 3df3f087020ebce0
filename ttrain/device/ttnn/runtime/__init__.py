"""ttnn in a process: its environment, the open chips, their queues and parts, captures, hangs, the profiler."""
