"""What the page of the operator publishes of memory is what the file holds."""

from collections.abc import Iterator

from published import RESULTS, assert_table, line, one, read, rounded


def operator_memory_table() -> Iterator[str]:
    rows = read(RESULTS / "operator_memory-cuda-bfloat16-torch2.11.0.csv")
    names = {"logsumexp": "A.logsumexp()", "eigenvalues(k=4)": "A.eigenvalues(k=4)", "stationary": "A.stationary()"}
    for operation in ("A @ x", "A.T @ y", *names):
        cells = []
        for row in (one(rows, tokens=tokens, op=operation) for tokens in ("2048", "8192", "32768")):
            share = 100 * float(row["peak_to_matrix"])
            cells.append(f"{rounded(row['peak_mib'], 0)} ({rounded(share, 1 if share < 10 else 0)} %)")
        yield line(f"`{names.get(operation, operation)}`", *cells)


def test_the_table_of_memory_is_its_file() -> None:
    assert_table("docs/operator.md", "Memory", 0, operator_memory_table())
