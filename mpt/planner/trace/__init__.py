"""The allocation trace and its readers: allocator, time, timeline."""
