"""ttnn as a process uses it: its environment, the open chips, their queues and parts, captures, hangs, the profiler."""
