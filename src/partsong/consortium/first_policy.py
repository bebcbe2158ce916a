"""site.toml as it is made when a site joins; from then on it is the site's."""

POLICY = """# What this site lets itself be asked for. It is read here alone, and no message can change it.
# Remove the # before a line to set it; an unknown key is an error.

# recipes = ["exact", "fedavg"]     # others are refused; without this line: all but secure-dsanls
# minimum_rows = 100                # without this line: twice the rank or more, where uploads are seen one by one;
                                    # not beside a budget about rows, which it would break
minimum_parties = 3                 # fewer in a sum are refused
maximum_rounds = 1000               # in one run
# maximum_runs = 20                 # over all time; without this line: any number
masked = true                       # the server sees sums alone
minimum_mask_bound = 1e6            # a smaller mask_bound is refused: with a refusal your numbers are compared with it
# columns = ["gene-*"]              # names or patterns of those that may leave; without this line: all
# tell_names = false                # without this line: a site of the roster that lacks columns, and knows the same
                                    # shared key, is told their names; sealed, so that the server cannot read them.
                                    # Not about words of texts: all sites learn those that they agree on

# [words]                           # of runs over texts
# allowed = true                    # false: none
# minimum_documents = 5             # an experiment that asks for words in fewer texts of a site is refused; else: 1
# minimum_parties = 3               # and at fewer sites; without this line: 2

# [privacy]                         # over everything that this site releases from now on
# epsilon = 3.0
# unit = "row"
# noiseless_before = 0              # releases without noise that there were before, which epsilon does not cover
"""
