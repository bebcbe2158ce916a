"""Who takes part in a federation, and how they come to know each other: certificates, keys, cards, rosters, kits."""
