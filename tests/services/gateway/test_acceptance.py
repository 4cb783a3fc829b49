"""What the gateway must show, point by point, and the tests that show it: a test that is renamed or lost is found."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
POINTS: dict[str, list[str]] = {
    "each client reads a text, a thinking, and a tool run by the client and by the bus": [
        "e2e/gateway/test_chat.py::test_a_streamed_text_and_its_thinking_are_read",
        "e2e/gateway/test_chat.py::test_a_call_of_a_clients_tool_is_sent_once_and_whole",
        "e2e/gateway/test_chat.py::test_calls_of_the_deployments_tools_run_on_the_bus_and_are_not_sent",
        "e2e/gateway/test_responses.py::test_a_streamed_text_and_its_thinking_are_read",
        "e2e/gateway/test_responses.py::test_a_call_of_a_tool_of_the_client_and_its_result_in_the_next_request",
        "e2e/gateway/test_responses.py::test_calls_of_the_deployments_tools_are_sent_only_on_request",
        "e2e/gateway/test_anthropic.py::test_text_and_thinking_are_read_under_each_base_url",
        "e2e/gateway/test_anthropic.py::test_a_tool_of_the_client_is_called_and_its_result_goes_back",
        "e2e/gateway/test_anthropic.py::test_a_tool_of_the_deployment_runs_on_the_bus_within_one_message",
        "e2e/gateway/test_gemini.py::test_text_and_thinking_are_read_in_each_version",
        "e2e/gateway/test_gemini.py::test_a_tool_of_the_client_is_called_and_its_result_goes_back",
        "e2e/gateway/test_gemini.py::test_a_tool_of_the_deployment_runs_on_the_bus_within_one_answer",
        "clients/test_gateway.py::test_a_chat_has_its_text_and_its_thinking_and_continues",
        "clients/test_gateway.py::test_a_tool_of_the_bus_is_shown_and_does_not_run_in_the_browser",
        "clients/test_gateway.py::test_a_tool_of_the_browser_runs_there_and_the_answer_continues_in_the_same_message",
        "clients/test_gateway.py::test_an_agent_has_its_text_and_its_thinking",
        "clients/test_gateway.py::test_an_agent_is_shown_the_tools_that_the_bus_runs",
        "clients/test_gateway.py::test_an_agent_runs_its_own_tools_between_two_runs",
        "clients/test_gateway.py::test_openais_client_for_node_runs_a_tool_and_sends_the_output_back",
        "more_clients/test_table.py::test_a_client_does_what_its_row_says",
        "integrations/test_livekit.py::test_livekits_own_openai_plug_in_reads_the_gateway",
        "integrations/test_pipecat.py::test_pipecats_own_openai_service_reads_the_gateway",
    ],
    "a gateway is killed: another process gives the byte-identical rest": [
        "e2e/gateway/test_responses.py::test_another_gateway_process_continues_a_stream_to_the_byte",
        "e2e/gateway/test_killed.py::test_gateways_come_and_go_and_no_client_is_left_with_a_silent_end",
        "e2e/gateway/test_crowd.py::test_under_kills_of_gateways_no_client_of_any_protocol_has_a_silent_end",
    ],
    "a client that goes closes the provider's socket; with `continue` the run goes on": [
        "e2e/gateway/test_killed.py::test_gateways_come_and_go_and_no_client_is_left_with_a_silent_end",
        "e2e/gateway/test_chat.py::test_a_client_that_leaves_ends_the_call_of_the_provider",
        "e2e/gateway/test_responses.py::test_a_client_that_leaves_ends_the_call_of_the_provider",
        "e2e/gateway/test_responses.py::test_closing_the_socket_cancels",
        "e2e/gateway/test_anthropic.py::test_a_client_that_leaves_ends_the_call_of_the_provider",
        "e2e/gateway/test_gemini.py::test_a_client_that_leaves_ends_the_call_of_the_provider",
        "e2e/gateway/test_responses.py::test_a_background_response_continues_without_its_client_until_it_is_cancelled",
    ],
    "an attempt fails after a thinking and a tool call: no client sees the void call": [
        "e2e/gateway/test_streams.py::test_a_call_of_a_failed_attempt_is_never_sent",
        "services/gateway/surfaces/test_openai_chat_stream.py::test_a_client_gets_no_call_of_a_failed_attempt",
        "services/gateway/surfaces/test_openai_responses_stream.py::test_the_call_of_a_failed_attempt_is_never_sent",
        "services/gateway/surfaces/test_anthropic_messages.py"
        "::test_a_client_gets_nothing_of_an_attempt_that_failed_after_thinking_and_a_call",
        "services/gateway/surfaces/test_gemini.py"
        "::test_a_client_gets_nothing_of_an_attempt_that_failed_after_thinking_and_a_call",
        "services/gateway/surfaces/test_ai_sdk_ui.py::test_a_call_that_a_retry_voids_is_never_available",
    ],
    "a cut stream is an error for every client": [
        "e2e/gateway/test_chat.py::test_a_cut_stream_is_an_error_and_never_a_silent_end",
        "e2e/gateway/test_responses.py::test_a_cut_stream_ends_as_failed",
        "e2e/gateway/test_anthropic.py::test_a_cut_is_an_error_for_every_reader",
        "e2e/gateway/test_gemini.py::test_a_cut_is_an_error_for_every_reader",
        "clients/test_gateway.py::test_a_cut_keeps_the_text_and_is_an_error",
        "clients/test_gateway.py::test_an_agent_gets_refusals_failures_and_cuts_as_errors",
        "clients/test_gateway.py::test_openais_client_for_node_gets_an_error_for_every_bad_end",
        "more_clients/test_table.py::test_a_client_does_what_its_row_says",
    ],
    "an hour of silence, in keep-alives of each surface": [
        "e2e/gateway/test_streams.py::test_a_silent_stream_is_kept_alive_in_its_protocol_and_then_continues",
        "e2e/gateway/test_native.py::test_a_silent_stream_is_kept_alive_and_a_reader_that_leaves_cancels_nothing",
    ],
    "another tenant's run is a 404 on every path": [
        "e2e/gateway/test_keys.py::test_another_tenants_run_looks_like_an_unknown_one",
        "e2e/gateway/test_keys.py::test_one_run_id_of_two_tenants_is_two_runs_and_no_answer_tells_of_the_other",
        "e2e/gateway/test_keys.py::test_a_list_of_runs_has_only_the_keys_own_runs",
    ],
    "each refused parameter is named": [
        "services/gateway/surfaces/test_openai_chat.py::test_what_has_no_counterpart_is_refused_by_name",
        "services/gateway/surfaces/test_openai_chat.py"
        "::test_a_hint_is_sent_to_providers_that_have_it_and_left_out_for_others",
        "services/gateway/surfaces/test_anthropic_messages.py::test_what_cannot_be_honoured_is_refused_by_name",
        "services/gateway/surfaces/test_gemini.py::test_what_cannot_be_honoured_is_refused_by_name",
        "services/gateway/surfaces/test_ai_sdk_ui.py::test_what_cannot_be_honoured_is_refused_by_name_in_plain_text",
        "services/gateway/surfaces/test_ag_ui.py::test_what_cannot_be_honoured_is_refused_by_name",
        "e2e/gateway/test_chat.py::test_a_parameter_without_a_counterpart_is_refused_by_name",
        "e2e/gateway/test_responses.py::test_a_parameter_without_a_counterpart_is_refused_by_name",
        "e2e/gateway/test_anthropic.py::test_a_parameter_without_a_counterpart_is_refused_by_name",
        "e2e/gateway/test_gemini.py::test_a_parameter_without_a_counterpart_is_refused_by_name",
        "e2e/gateway/test_images.py::test_what_cannot_be_honoured_is_refused_by_name",
    ],
    "one Idempotency-Key twice is one run": [
        "e2e/gateway/test_native.py::test_the_same_idempotency_key_twice_is_one_run",
        "e2e/gateway/test_keys.py::test_one_idempotency_key_of_two_tenants_is_two_runs",
    ],
    "no encoder sends bytes that break a client": [
        "services/gateway/surfaces/test_sse_dialects.py::test_any_log",
        "services/gateway/surfaces/test_sse_dialects.py::test_every_recorded_stream",
        "services/gateway/surfaces/test_cut_and_retried.py"
        "::test_recorded_streams_cut_and_retried_are_accepted_with_their_text",
    ],
    "Open Responses' schema accepts every response and event": [
        "services/gateway/surfaces/test_open_responses.py::test_every_recorded_stream",
        "services/gateway/surfaces/test_open_responses.py::test_any_log",
        "services/gateway/surfaces/test_open_responses.py::test_each_kind_of_answer_to_a_request",
    ],
    "of Durable Streams' conformance suite what a session can take passes": [
        "more_clients/test_durable_streams.py::test_the_conformance_suite_passes",
        "clients/test_gateway.py::test_a_runs_log_is_a_durable_stream",
    ],
    "checkers of providers have no complaint": [
        "more_clients/test_checkers.py::test_compatcanary_has_no_complaint",
        "more_clients/test_checkers.py::test_trustedrouter_provider_check_has_no_complaint",
    ],
}


@cache
def _tests_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("point", POINTS)
def test_each_point_has_its_tests(point: str) -> None:
    for test in POINTS[point]:
        file, name = test.split("::")
        assert name in _tests_in(file), test
