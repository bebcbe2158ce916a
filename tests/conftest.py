"""What all tests share."""

import signal

import pytest

WAITING = (
    "tests/benchmarks/test_benchmarks.py::test_history_is_the_error_of_the_iterate_evaluated_independently[dense-hals]",
    "tests/benchmarks/test_benchmarks.py::test_memory_counts_the_data_and_the_factors",
    "tests/benchmarks/test_benchmarks.py::test_what_a_federation_costs_is_measured_and_written",
    "tests/cli/test_attack.py::test_the_row_is_found_in_every_method_of_which_the_page_says_so[fnmf-",
    "tests/cli/test_fit.py::TestGoingOn::test_known_cells_stay_so",
    "tests/cli/test_fit_ranks.py::TestArrivals::test_a_time_budget_ends_all_ranks",
    "tests/cli/test_fit_ranks.py::TestArrivals::test_a_tolerance_ends_all_ranks_with_a_model_for_all",
    "tests/cli/test_fit_ranks.py::TestAsynchronousFailures::",
    "tests/cli/test_fit_ranks.py::TestFailedEnds::test_no_shard_outlives_a_model_that_cannot_be_written",
    "tests/cli/test_fit_ranks.py::TestFailedEnds::test_shards_of_an_earlier_fit_are_not_mixed_with_new_ones",
    "tests/cli/test_fit_ranks.py::TestFailures::test_all_ranks_end_with_one_message_and_no_file[more",
    "tests/cli/test_fit_ranks.py::TestFailures::test_all_ranks_end_with_one_message_and_no_file[no",
    "tests/cli/test_fit_ranks.py::TestFailures::test_all_ranks_end_with_one_message_and_no_file[other",
    "tests/cli/test_fit_ranks.py::TestGamesOverMpi::test_the_same_bits_as_in_one_process[2]",
    "tests/cli/test_fit_ranks.py::TestOverMpi::test_a_time_budget_ends_all_ranks",
    "tests/cli/test_fit_ranks.py::TestOverMpi::test_an_interrupt_at_one_rank_saves_the_model_of_all[2]",
    "tests/cli/test_fit_ranks.py::TestOverMpi::test_ranks_without_a_seed_agree_on_one",
    "tests/cli/test_fit_ranks.py::TestOverMpi::test_sums_in_order_and_a_run_folder",
    "tests/cli/test_fit_ranks.py::TestOverMpi::test_text_is_read_whole_and_keeps_its_names",
    "tests/cli/test_fit_ranks.py::TestOverTorch::test_bad_values_at_one_rank_end_both",
    "tests/cli/test_fit_ranks.py::TestSignals::test_a_signal_at_one_rank_gives_all_its_code[asyn-sd-",
    "tests/cli/test_fit_ranks.py::TestSignals::test_nothing_is_saved_and_all_ranks_say_so[twice-",
    "tests/cli/test_fit_ranks.py::TestTrouble::",
    "tests/cli/test_main.py::test_interrupt_saves_the_model_and_the_run_can_go_on[parts]",
    "tests/experiments/test_game.py::test_held_out_ratings_are_not_learned_from",
    "tests/experiments/test_privacy.py::",
    "tests/experiments/test_topics.py::test_tensors_give_what_arrays_give",
    "tests/integration/mpi/test_mpi.py::test_a_rank_that_fails_or_dies_ends_the_job_within_ten_seconds[bug",
    "tests/integration/mpi/test_mpi.py::test_a_rank_that_fails_or_dies_ends_the_job_within_ten_seconds[exit",
    "tests/integration/mpi/test_mpi.py::test_a_rank_that_fails_or_dies_ends_the_job_within_ten_seconds[ours",
    "tests/integration/mpi/test_mpi.py::test_ranks_agree_with_sequential_and_on_what_to_refuse[2]",
    "tests/integration/mpi/test_mpi_async.py::test_a_caller_that_leaves_its_loop_ends_the_run_everywhere_and_says_why[3]",
    "tests/integration/mpi/test_mpi_async.py::test_a_rank_that_fails_or_dies_ends_the_job_within_ten_seconds[p01-bug",
    "tests/integration/mpi/test_mpi_async.py::test_a_rank_that_fails_or_dies_ends_the_job_within_ten_seconds[p01-exit",
    "tests/integration/mpi/test_mpi_async.py::test_a_rank_that_fails_or_dies_ends_the_job_within_ten_seconds[p01-ours",
    "tests/integration/mpi/test_mpi_async.py::test_a_rank_that_fails_or_dies_ends_the_job_within_ten_seconds[server-",
    "tests/integration/mpi/test_mpi_async.py::test_a_rank_that_fails_or_dies_ends_the_job_within_ten_seconds[tired",
    "tests/integration/mpi/test_mpi_async.py::test_a_run_ends_once_the_slowest_has_been_heard_whose_last_piece_is_not_taken_in",
    "tests/integration/mpi/test_mpi_async.py::test_who_is_faster_contributes_more",
    "tests/integration/torch/test_torch_distributed.py::test_a_rank_that_dies_or_fails_ends_the_others_within_ten_seconds[ours",
    "tests/integration/torch/test_torch_distributed.py::test_a_rank_that_fails_in_the_middle_ends_a_job_of_torchrun_within_ten_seconds[bug",
    "tests/integration/torch/test_torch_distributed.py::test_a_rank_that_fails_in_the_middle_ends_a_job_of_torchrun_within_ten_seconds[ours",
    "tests/integration/torch/test_torch_distributed.py::test_ranks_agree_with_sequential_and_on_what_to_refuse[arrays]",
    "tests/laws/test_auditing.py::test_a_weight_that_is_not_bounded_is_found_in_private_sums",
    "tests/laws/test_secure_sketched.py::test_agreeing_before_every_step_of_w_beats_agreeing_now_and_then",
    "tests/test_import.py::test_a_fit_needs_no_place_for_compiled_code",
    "tests/unit/data/test_mapped.py::test_a_few_very_wide_rows_are_not_read_all_at_once[F]",
    "tests/unit/data/test_mapped.py::test_memory_stays_far_below_the_size_of_the_file[F]",
)
"""Cases that wait for processes or compilers, with others like them that are always run: `make test-all` has them."""


def pytest_collection_modifyitems(items):
    """Mark those as slow."""
    for item in items:
        if item.nodeid.startswith(WAITING):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard():
    """Ctrl-C works as in a terminal, also where tests run in the background of a shell that has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
