"""Examinations: the doctor's, partings of runs, ranks against one process, a resume against a run without a stop."""
