"""Fast forms of `mor.fp8`, same names, same results."""
