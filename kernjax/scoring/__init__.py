"""Teacher-forced scoring: prefill in windows, decode step by step, distributions kept on device."""
