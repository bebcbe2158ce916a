"""site.toml as it is made when a site joins; from then on it is the site's."""

POLICY = """# What this site lets itself be asked for. It is read here alone, and no message can change it.
# Remove the # before a line to set it; an unknown key is an error.

# recipes = ["exact", "fedavg"]     # others are refused; without this line: all
# minimum_rows = 100                # without this line: twice the rank, where uploads are seen one by one
minimum_parties = 3                 # fewer in a sum are refused
maximum_rounds = 1000               # in one run
# maximum_runs = 20                 # over all time; without this line: any number
masked = true                       # the server sees sums alone
# columns = ["gene-*"]              # names or patterns of those that may leave; without this line: all

# [privacy]                         # over everything that this site ever releases
# epsilon = 3.0
# unit = "row"
"""
