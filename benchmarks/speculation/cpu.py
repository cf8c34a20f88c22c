def add_options(parser):
    parser.set_defaults(run=lambda o: 0)
