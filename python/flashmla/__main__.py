from flashmla.cli import main

main()
