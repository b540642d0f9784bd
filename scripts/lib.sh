# shellcheck shell=bash
# Shared by the scripts beside it. Source it after `set -euo pipefail`.

# The administrator's programs and a hand-installed Go, also where a login's PATH lacks them.
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin:/usr/local/go/bin"
# Distributions pin GOTOOLCHAIN=local; go.mod says which version is needed.
export GOTOOLCHAIN="${CUBELET_GOTOOLCHAIN:-auto}"

if [[ -t 1 && -z ${NO_COLOR:-} ]]; then
	bold=$'\e[1m' dim=$'\e[2m' red=$'\e[31m' green=$'\e[32m' plain=$'\e[0m'
else
	bold='' dim='' red='' green='' plain=''
fi

say() { printf '%s==>%s %s\n' "$bold$green" "$plain" "$*"; }
note() { printf '    %s%s%s\n' "$dim" "$*" "$plain"; }
die() {
	printf '%serror:%s %s\n' "$bold$red" "$plain" "$*" >&2
	exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

need_root() { [[ $EUID -eq 0 ]] || die "$1: run it as root"; }

# apt_get ARGS…: apt-get that waits for other package managers and tries again when a
# mirror or a lock was busy.
apt_get() {
	local try
	for try in 1 2 3; do
		if DEBIAN_FRONTEND=noninteractive apt-get -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -o APT::Sandbox::User=root "$@"; then
			return 0
		fi
		[[ $try -eq 3 ]] || { note "apt-get $1 did not work (attempt $try of 3); trying again in $((try * 5)) s" >&2 && sleep $((try * 5)); }
	done
	return 1
}

# apt_knows PACKAGE: whether the package lists of this machine have it.
apt_knows() { [[ -n $(apt-cache --no-all-versions show "$1" 2>/dev/null) ]]; }

# apt_candidate PACKAGE: the version that apt would install, empty when it knows none.
apt_candidate() { apt-cache policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: *//p' | sed 's/(none)//'; }

# apt_targets: one line "URI RELEASE COMPONENT FILE:NUMBER" per package list that this
# machine's own sources name, in both formats of sources.
apt_targets() {
	apt-get indextargets --format "\$(REPO_URI) \$(RELEASE) \$(COMPONENT) \$(SOURCESENTRY)" 'Created-By: Packages' | sort -u
}

# apt_keyring FILE:NUMBER: the keyring file that signs a source, the archive's own when
# the source names none (or carries the key in its text).
apt_keyring() {
	local file=${1%:*} line=${1##*:} key=''
	case $file in
	*.sources) key=$(awk -v RS='' -v want="$line" '
		NR == want { n = split($0, l, "\n"); for (i = 1; i <= n; i++) if (tolower(l[i]) ~ /^signed-by:/) { sub(/^[^:]*: */, "", l[i]); print l[i] } }' "$file") ;;
	*) key=$(sed -n "${line}s/.*[[ ]signed-by=\([^] ]*\).*/\1/p" "$file") ;;
	esac
	if [[ $key != /* ]]; then
		key=/usr/share/keyrings/debian-archive-keyring.gpg
		[[ -e $key ]] || key=''
	fi
	printf '%s' "$key"
}

codename() { (. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}"); }
