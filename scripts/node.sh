# shellcheck shell=bash
# Start and stop the node of CUBELET_ROOT. Source it after lib.sh, with repo set.
# shellcheck disable=SC2154 # repo and the colours are the sourcing script's

CUBELET_ROOT=$(realpath -m "${CUBELET_ROOT:-/var/lib/cubelet}")
export CUBELET_ADDRESS="${CUBELET_ADDRESS:-unix://$CUBELET_ROOT/run/cubelet.sock}"
node_log=$CUBELET_ROOT/cubelet.log
node_lock=$CUBELET_ROOT/cubelet.pid

cubecli() { "$repo/bin/cubecli" "$@"; }

# node_runs: a daemon holds the lock on its PID file as long as it lives.
node_runs() { [[ -e $node_lock ]] && ! flock --nonblock --shared "$node_lock" true; }

# wait_until SECONDS COMMAND…: polls; false when it never succeeded.
wait_until() {
	local end=$((SECONDS + $1))
	shift
	until "$@" >/dev/null 2>&1; do
		[[ $SECONDS -lt $end ]] || return 1
		sleep 0.1
	done
}

place_kernel() {
	"$repo/scripts/fetch-kernel" "$repo/build/kernel"
	if [[ -s $CUBELET_ROOT/kernel/release ]]; then
		note "$CUBELET_ROOT/kernel: $(<"$CUBELET_ROOT/kernel/release")"
		return
	fi
	install -d -m 0711 "$CUBELET_ROOT"
	rm -rf "$CUBELET_ROOT/kernel.new"
	cp -a --reflink=auto "$repo/build/kernel" "$CUBELET_ROOT/kernel.new"
	mv -T "$CUBELET_ROOT/kernel.new" "$CUBELET_ROOT/kernel"
}

# start_node starts the daemon of bin/ in the background, unless one runs, and returns
# when it answers.
start_node() {
	local pid
	if node_runs; then
		wait_until 30 cubecli version || explain "a node holds $node_lock and does not answer on $CUBELET_ADDRESS"
		if [[ $(readlink "/proc/$(<"$node_lock")/exe") != *' (deleted)' ]]; then
			note "it runs already (process $(<"$node_lock"))"
			return
		fi
		note "process $(<"$node_lock") runs an older build: restarting it; its sandboxes go on"
		stop_node
	fi
	install -d -m 0711 "$CUBELET_ROOT"
	setsid "$repo/bin/cubelet" serve --root "$CUBELET_ROOT" --libexec "$repo/bin" </dev/null >>"$node_log" 2>&1 &
	pid=$!
	wait_until 120 ready_or_gone "$pid" || explain "the node did not answer within 120 s"
	kill -0 "$pid" 2>/dev/null || explain "the node ended during its start"
	note "process $pid, log $node_log"
}

ready_or_gone() { ! kill -0 "$1" 2>/dev/null || cubecli version; }

# explain TEXT: says what is known about a node that does not work, and ends the script.
explain() {
	printf '\n%s--- end of %s ---%s\n' "$dim" "$node_log" "$plain" >&2
	tail -n 30 "$node_log" >&2 || true
	printf '\n%s--- cubelet doctor ---%s\n' "$dim" "$plain" >&2
	"$repo/bin/cubelet" doctor --root "$CUBELET_ROOT" --libexec "$repo/bin" >&2 || true
	die "$1"
}

# place_template makes the template base, unless the node has it.
place_template() {
	if cubecli template inspect base >/dev/null 2>&1; then
		note "it is there already"
		return
	fi
	"$repo/scripts/build-base-image" "$repo/build/images/base.tar"
	cubecli template create --name base --from-archive "$repo/build/images/base.tar"
}

# stop_node ends the daemon and returns when it is gone. Sandboxes go on without it.
stop_node() {
	local pid
	node_runs || return 0
	pid=$(<"$node_lock")
	[[ $pid =~ ^[0-9]+$ ]] || die "$node_lock holds no process ID"
	kill -TERM "$pid"
	flock --shared --wait 60 "$node_lock" true || die "process $pid did not end within 60 s of SIGTERM; see $node_log"
}

# delete_sandboxes deletes every sandbox of the running node.
delete_sandboxes() {
	local ids
	mapfile -t ids < <(cubecli sandbox list -q)
	[[ ${#ids[@]} -eq 0 ]] || cubecli sandbox delete --ignore-missing "${ids[@]}" >/dev/null
	note "sandboxes deleted: ${#ids[@]}"
}
