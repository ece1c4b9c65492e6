"""Limits of keys over several ingresses: a board that sums up what all of them use, and what each makes of it."""
