"""The command line itself: arguments, completion, skeletons of parts."""
