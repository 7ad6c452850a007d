"""Plans of training steps that know nothing of mpt."""
