"""The chaos campaign: P, D, a router and stores as real processes, hurt at random moments."""
