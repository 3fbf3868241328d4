"""Fits the roofline's coefficients to measurements, and says how far off the fit is where it was not measured."""
