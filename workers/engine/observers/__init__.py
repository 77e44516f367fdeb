"""Observers of steps: who only watches them (base/step_observer.py). Others stand beside what they serve."""
