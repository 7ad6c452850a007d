"""Everything counted, averaged, evaluated and logged during a training."""
