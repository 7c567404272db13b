"""Engines run a cohort and yield its messages in cohort order; they alone know hardware."""
