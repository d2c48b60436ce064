"""The status page opens by a link that works once, and then by a cookie."""

import pytest
from flask.testing import FlaskClient

from job_server.server.guard import Guard
from job_server.server.page_login import COOKIE_S, LINK_S, PageLogin
from job_server.server.service import JobService
from tests.job_server.serving import browse, open_service

TOKEN = "correct-horse"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
HERE = "http://127.0.0.1:8180"


@pytest.fixture
def service():
    with open_service() as service:
        yield service


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def guard(clock):
    return Guard(token=TOKEN, login=PageLogin(lambda: clock[0]))


@pytest.fixture
def browser(service: JobService, guard: Guard) -> FlaskClient:
    return browse(service, guard)


def link(client: FlaskClient) -> str:
    answer = client.post("/api/v1/page_link", headers=BEARER)
    assert answer.status_code == 200
    return str(answer.get_json()["path"])


def status(client: FlaskClient, path: str = "/", **headers: str) -> int:
    return client.get(path, base_url=HERE, headers=headers).status_code


def test_a_link_opens_the_page_once_and_the_cookie_from_then_on(browser, service, guard):
    path = link(browser)
    assert status(browser) == 401
    opened = browser.get(path, base_url=HERE)
    assert opened.status_code == 200
    assert 'content="0; url=../"' in opened.text
    cookie = opened.headers["Set-Cookie"]
    for part in ("edl_page_8180=", "HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=604800"):
        assert part in cookie
    assert TOKEN not in path + cookie
    assert opened.headers["Cache-Control"] == "no-store"
    assert "frame-ancestors 'none'" in opened.headers["Content-Security-Policy"]
    assert status(browser) == status(browser) == 200
    assert status(browser, path) == 200, "a used link leads to the page whoever may see it"

    stranger = browse(service, guard)
    used = stranger.get(path, base_url=HERE)
    assert used.status_code == 401
    assert "Set-Cookie" not in used.headers
    assert "edl page" in used.text
    assert status(stranger) == 401


def test_the_cookie_opens_the_page_and_nothing_else(browser):
    browser.get(link(browser), base_url=HERE)
    for path in ("/api/v1/jobs", "/api/v1/openapi.json", "/rest/1.0/get/query_pods", "/nothing"):
        assert status(browser, path) == 401
    for path in ("/api/v1/jobs/run/stop", "/api/v1/page_link"):
        assert browser.post(path, base_url=HERE).status_code == 401
    assert browser.post("/", base_url=HERE).status_code == 405
    assert status(browser, Origin="http://127.0.0.1:9999") == 403


def test_an_old_link_and_an_old_cookie_open_nothing(browser, clock):
    path = link(browser)
    clock[0] = LINK_S
    assert status(browser, path) == 401
    browser.get(link(browser), base_url=HERE)
    clock[0] += COOKIE_S - 1
    assert status(browser) == 200
    clock[0] += 1
    refused = browser.get("/", base_url=HERE)
    assert refused.status_code == 401
    assert "`edl page` prints a link that opens this page" in refused.json["error"]
    assert refused.headers["WWW-Authenticate"].startswith("Basic")


def test_a_look_at_the_link_does_not_use_it_up(browser):
    path = link(browser)
    assert browser.head(path, base_url=HERE).status_code == 401
    assert status(browser, path) == 200


def test_wrong_links_open_nothing(browser):
    for path in ("/open/x", "/open/%ff%00", f"/open/{TOKEN}", "/open/" + "a" * 5000):
        assert status(browser, path) == 401


def test_pages_of_two_servers_on_one_machine_stay_open_beside_each_other(service):
    browsers, there = [], "http://127.0.0.1:8181"
    for base in (HERE, there):
        client = browse(service, Guard(token=TOKEN))
        opened = client.get(link(client), base_url=base)
        browsers.append((client, base, opened.headers["Set-Cookie"].partition(";")[0]))
    both = "; ".join(cookie for _, _, cookie in browsers)
    for client, base, _ in browsers:
        fresh = client.application.test_client(use_cookies=False)
        assert fresh.get("/", base_url=base, headers={"Cookie": both}).status_code == 200


def test_links_that_nobody_opens_do_not_pile_up(browser):
    first, *_, last = [link(browser) for _ in range(101)]
    assert status(browser, first) == 401
    assert status(browser, last) == 200


def test_a_server_without_a_token_needs_no_link(service):
    client = browse(service)
    assert client.post("/api/v1/page_link", base_url=HERE).json == {"path": "/"}
    assert status(client, "/open/x") == 200
    assert status(client) == 200


def test_a_copy_to_keep_does_not_ask_again(browser):
    assert 'http-equiv="refresh"' in browser.get("/", headers=BEARER).text
    copy = browser.get("/?refresh=0", headers=BEARER).text
    assert "http-equiv" not in copy
    assert "A copy, as it was at 2" in copy
