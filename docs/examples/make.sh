#!/usr/bin/env bash
# Makes the example reports beside this file: one red and one green run on the demo.
# From the repository's root:
#   bash docs/examples/make.sh            all of it
#   bash docs/examples/make.sh run        runs the model, judges, locates; minutes
#   bash docs/examples/make.sh draw       draws the reports again from the verdict.json here; seconds
#   bash docs/examples/make.sh pictures   screenshots of the red one; needs chromium
set -euo pipefail
here=docs/examples demo=kernjax/demo/recordings work=${WORK:-out/examples}
[ -d "$demo" ] || { echo "run this from the repository's root" >&2; exit 3; }

run() {
    # Exit code 1 is what the red one is for.
    python -m kernjax.check --policy=fp8 --output_dir="$work/red" >/dev/null || [ $? -eq 1 ]
    python -m kernjax.locate --policy=fp8 --output_dir="$work/where" >/dev/null || [ $? -eq 2 ]
    python -m kernjax.check --candidate=$demo/demo.chunk32.zip --output_dir="$work/green" >/dev/null
    for colour in red green; do
        mkdir -p $here/$colour
        cp "$work/$colour"/{verdict.json,figures.json} $here/$colour/
    done
    cp "$work/where/locate.json" $here/red/
}

draw() {
    python -m kernjax.report --verdict=$here/red --locate=$here/red --output_dir=$here/red >/dev/null
    python -m kernjax.report --verdict=$here/green --output_dir=$here/green >/dev/null
    rm -f $here/{red,green}/report.txt
}

shot() { # NAME PAGE WIDTH HEIGHT [dark]
    local scheme=1
    [ "${5:-}" = dark ] && scheme=0
    chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars \
        --user-data-dir="$(pwd)/$work/profile" --blink-settings=preferredColorScheme=$scheme \
        --window-size="$3,$4" --screenshot="$(pwd)/$here/$1.png" "file://$2" 2>/dev/null
}

pictures() {
    mkdir -p "$work"
    # Chromium's window is no narrower than 500 pixels: the phone is a frame in it.
    local page phone
    page=$(pwd)/$here/red/report.html
    phone=$(pwd)/$work/phone.html
    echo "<body style='margin:0 55px;background:#999'><iframe src='file://$page'" \
        "style='border:0;width:390px;height:1500px'></iframe>" >"$phone"
    shot phone "$phone" 500 1500
    shot laptop "$page" 1280 1500
    shot laptop_dark "$page" 1280 1500 dark
    shot wide "$page" 1920 1500
}

for step in "${@:-run draw pictures}"; do
    for one in $step; do
        case $one in
            run | draw | pictures) "$one" ;;
            *) echo "unknown step $one; known: run, draw, pictures" >&2; exit 3 ;;
        esac
    done
done
